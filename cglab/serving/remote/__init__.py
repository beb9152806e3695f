"""Scripts for the server's own Python, which has SGLang and no cglab: they import nothing of it."""

"""Real SGLang servers as arms of a comparison: what is installed, how one is started, asked and ended."""

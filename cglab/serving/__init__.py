"""Real SGLang servers as arms: launched, driven by SGLang's own serving benchmark, scraped and compared.

SGLang is never imported here: it runs in its own Python, which is asked through processes and HTTP.
"""

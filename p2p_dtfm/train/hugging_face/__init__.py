"""Models as Hugging Face's `transformers` knows them, in and out.

Imports `model` and `data`. Begin with `export`.
"""

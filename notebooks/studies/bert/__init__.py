"""The study of fine-tuned BERTs: its sentences, its zoo, its spec and its page."""

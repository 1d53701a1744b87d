"""The paper's two zoos of transformers at their own size: specs that are ready to run, and what they would cost."""

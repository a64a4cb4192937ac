"""Training data: tokenizers, indexed files of tokens, and the samples that GPT-2 is trained on."""

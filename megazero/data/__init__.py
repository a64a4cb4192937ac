"""Training data: from what --train-data names to the samples that GPT-2 is trained on.

Read first: `build` (from flags to datasets), `corpora` (the files that a flag names), `sources` (these opened and checked),
`gpt2_dataset` and `gpt2_index` (samples and their order), `blend` (several corpora as one), `sampler` (those of a rank).
Files: `indexed_dataset` and `mmidx` (tokens), `sidecar` (which tokenizer made them), `cache` (index arrays), `arrays` (all of an
array, or an error). Vocabularies: `tokenizer` and `gpt2_bpe`; for transformers, `tokenizer_export` and `sentencepiece_json`. From
text to tokens: `preprocess` and `encoding`, on `megazero.lines`.
"""

"""megazero: GPT-2 pretraining with Megatron-style tensor parallelism and ZeRO built in."""

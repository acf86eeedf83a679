"""Checkpoints of others: Hugging Face folders, safetensors and torch files, torch.distributed.checkpoint's folders."""

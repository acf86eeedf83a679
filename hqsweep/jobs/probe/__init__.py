"""The probe job: formats tried on captured tensors."""

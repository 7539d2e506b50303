"""Gradients added up among workers by a process group of torch.distributed, made anew for each generation."""

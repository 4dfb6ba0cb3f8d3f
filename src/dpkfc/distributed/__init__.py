"""Share one logical batch over several processes of torch.distributed."""

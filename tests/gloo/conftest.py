import torch

# Bits are compared between processes: each has the same one thread.
torch.set_num_threads(1)

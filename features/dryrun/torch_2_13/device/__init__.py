"""The fake GPU: tensors, streams, functions of torch.cuda, and collectives without
other ranks."""

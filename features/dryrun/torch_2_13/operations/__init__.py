"""Operations of torch on fake tensors: their values, their work, and the memory that
their kernels take."""

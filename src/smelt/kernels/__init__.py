"""Fast kernels for CPU and GPU. Each agrees with a plain PyTorch reference, which `dispatch.use_backend` can force."""

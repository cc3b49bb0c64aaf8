"""Facts about third-party APIs, one module each. They import only the public names of `resilient`."""

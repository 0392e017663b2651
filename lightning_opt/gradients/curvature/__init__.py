"""The Hessian's trace, diagonal and sharpness by vector products, and a preconditioner."""

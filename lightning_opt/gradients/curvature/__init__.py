"""The Hessian by products: trace, diagonal, sharpness, and a preconditioner."""

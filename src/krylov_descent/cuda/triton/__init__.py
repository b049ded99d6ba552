"""Products of float32 matrices on a GPU's tensor cores, and the operations around them, in Triton.

Optional: without Triton, or on a GPU without enough shared memory, torch's operations run instead.

`entry` decides whether the kernels can be used; `trial` compiles and tests them. `entry` also makes
`products.TensorCoreProducts`, a dispatch mode that sees every tensor operation while a part of a
step is recorded. Replaying a recording costs no time in Python. The mode dispatches

    mm, addmm                       to `matrices`
    sigmoid, tanh, relu, add, mul   to `functions_of_products`
    a loss that asks for it         to `cross_entropy`

each of which falls back to the torch operation for tensors that its kernels do not support.

A product needs both matrices as `split_fp16.SplitMatrix`, a sum of two matrices in fp16. Splits are
used again: a weight's in the forward and backward pass, an input's for values and weight gradients.
So `matrix_cache` keeps them by the matrix's storage until an operation writes to it. A kernel that
computes a function of a product also writes the split of the result.

A product is lazy (`lazy_products`). If the next operation is a sum or a known function of it, one
kernel computes both, and the product itself is never written. Any other operation that reads the
product materialises it first.

A recording has parallel branches. The cache and the lazy products note the stream on which a tensor
was computed, and make other streams wait before they read it.

`kernels` and `vector_kernels` hold the Triton kernels; `launching` launches them.
"""

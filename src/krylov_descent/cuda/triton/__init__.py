"""Products of float32 matrices on a GPU's tensor cores, and the operations around them, in Triton.

Optional: without Triton, or on a GPU without enough shared memory, torch's operations run instead.

`entry` decides whether the kernels can be used, which `trial` compiles and tries, and enters
`products.TensorCoreProducts`, a dispatch mode: while a part of a step is recorded, every operation
on tensors passes by it. A recording holds kernels, so it costs a step nothing that they were chosen
in Python. The mode hands on

    mm, addmm                       to `matrices`
    sigmoid, tanh, relu, add, mul   to `functions_of_products`
    mv, addmv, inner products       to `vectors`
    a loss that asks for it         to `cross_entropy`

each of which replaces a torch operation and calls that where its kernels are not for the tensors.

A product needs both matrices as `split_fp16.SplitMatrix`, a sum of two matrices in fp16. Splits are
kept in `matrix_cache` by the memory of the matrix, until something writes there: a weight is used
going forward and back, an input for values and for weight gradients. Where a matrix is a function
of a product, the kernel that computes it writes its split, too.

A product is not computed at once (`lazy_products`). If a sum or a known function of it is asked
for, one kernel computes everything, and the product itself is never written. Whatever else reads
the product has it materialised first.

Streams: a recording has parallel branches. The cache and the lazy products note on which stream
something was made, and let another stream that reads it wait.

`kernels` and `vector_kernels` are in Triton's language, and launched by `launching`.
"""

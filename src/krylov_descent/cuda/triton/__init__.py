"""Products of float32 matrices on a GPU's tensor cores, as exact as float32 or as tf32."""

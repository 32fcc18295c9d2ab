"""`bench`, kind slice: one device as one rank of a wide expert-parallel deployment (cli-contract, bench).

deployment     what is measured, refused, and made of step times
random_arrays  weights and caches of the rank
rank           the engine's programs over them, one point of the sweep each
parts, floors  what a step consists of, and the least that each part could take
measuring      compiles, times and reports the points
"""

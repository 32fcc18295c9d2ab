"""Operations of the engine that have, or will have, hand-written kernels. One folder an operation.

`reference.py` is the definition in plain jnp and runs anywhere; `api.py` picks an implementation.
"""

# Kernels are Python that Triton's compiler reads, and its types are not Python's: a pointer plus a tensor, a constant
# in place of a type. So to the type checker all of Triton is Any, whether it is installed or not.
from typing import Any

def __getattr__(name: str) -> Any: ...

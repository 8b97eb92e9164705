"""Everything that holds weights."""

from residual_ebm.models.amx import mend_amx
from residual_ebm.models.memory import keep_freed_memory

mend_amx()
keep_freed_memory()

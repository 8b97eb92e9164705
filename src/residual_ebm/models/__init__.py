"""Everything that holds weights."""

from residual_ebm.models.amx import mend_amx

mend_amx()

"""Everything that holds weights."""

from residual_ebm.models.amx import avoid_broken_amx

avoid_broken_amx()

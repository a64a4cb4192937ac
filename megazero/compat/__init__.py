"""Entry points of other systems, for their users' scripts: `colossalai` and `patrickstar`. They adapt megazero's own engine."""

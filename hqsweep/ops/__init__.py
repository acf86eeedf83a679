"""Operations on formats: one call each, dispatched to the compiled kernel where there is one and to the reference elsewhere."""

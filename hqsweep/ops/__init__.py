"""Operations on formats: one call each, by the compiled kernel where there is one and by the reference elsewhere."""

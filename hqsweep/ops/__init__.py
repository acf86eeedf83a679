"""Operations on formats: each is one call, which runs the compiled kernel if there is one, else the reference."""

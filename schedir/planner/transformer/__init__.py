"""Operations, times and bytes of the layers of a transformer."""

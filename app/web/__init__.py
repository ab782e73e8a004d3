"""The HTTP edge: reading JSON, refusing what cannot be kept, and turning operations into answers."""

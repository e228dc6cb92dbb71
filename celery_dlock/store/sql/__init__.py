"""Lock stores in SQL databases, and the migrations of their tables."""

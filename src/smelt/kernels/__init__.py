"""Fast twins of plain computations. Each stands beside a reference, and can be asked which path it takes."""

"""Export of integer graphs as ONNX: of integer operators (`graph`), or of float ones between QDQ pairs (`qdq`)."""

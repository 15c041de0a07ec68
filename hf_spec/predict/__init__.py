"""What methods predict with: tables, Markov heads, decoders, blocks, losses."""

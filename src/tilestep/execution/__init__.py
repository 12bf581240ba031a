"""How steps run: in backward or the next forward (`overlap`), sharded over ranks (`zero`), as a graph (`capture`)."""

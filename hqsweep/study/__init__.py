"""Studies as wholes: seeds added until every arm has a verdict, the noise of earlier studies, plans."""

"""The paper's laboratory: its problems, their data and models, and what trains and compares them.

The laboratory stands on the library and never the other way round. It needs the extra `lab`
(`pip install "krylov-descent[lab]"`).
"""

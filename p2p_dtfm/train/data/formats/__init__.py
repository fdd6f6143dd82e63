"""How files hold rows: columns of tables, and lines that may be compressed."""

"""What a run leaves behind: report.json, tables, pictures."""

"""What several test files share: models, tables of cases, strategies of hypothesis, and readers of messages."""

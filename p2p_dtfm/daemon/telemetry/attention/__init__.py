"""What somebody who does not look at a screen is told: `watch` judges, `outbox` carries."""

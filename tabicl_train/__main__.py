"""python -m tabicl_train is tabicl-train."""

from tabicl_train.commands import train

if __name__ == "__main__":
    train()

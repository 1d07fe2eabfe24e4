from tabicl_train.commands import train

if __name__ == "__main__":
    train()

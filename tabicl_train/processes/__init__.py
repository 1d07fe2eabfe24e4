"""Several processes that train one model: how they are started, meet, agree and notice a loss."""

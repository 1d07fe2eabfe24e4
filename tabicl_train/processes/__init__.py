"""The processes that train one model together: how they are started, join, agree, and notice that one is lost."""

module refit.dev/e2e/cluster/pause

go 1.26

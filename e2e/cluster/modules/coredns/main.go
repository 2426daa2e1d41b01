// CoreDNS with the three plug-ins that the cluster's Corefile names.
// The stock program links some sixty, cloud SDKs among them, which doubles its build time.
package main

import (
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	coremain.Run()
}

"""Every name that Kubernetes, people and pods see: one place, one spelling."""

GROUP = "refit.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
AUDIENCE = "refit.dev"  # of the projected tokens

LABEL_GROUP = f"{GROUP}/group"  # the RefitGroup's name, on every child and pod
LABEL_ROLE = f"{GROUP}/role"  # trainer | generator
LABEL_TEMPLATE = f"{GROUP}/template-hash"
ROLE_TRAINER = "trainer"
ROLE_GENERATOR = "generator"
READINESS_GATE = f"{GROUP}/synced"
FINALIZER = f"{GROUP}/lease-drain"
FIELD_MANAGER = "refit-operator"
POD_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

CATALOG_PORT = 7450
WORKER_PORT = 7451  # manifests, served by trainer ranks and relays: port + local rank
METRICS_PORT = 7452

SETTINGS_DIR = "/etc/refit"
SETTINGS_FILE = f"{SETTINGS_DIR}/settings.json"
CA_FILE = f"{SETTINGS_DIR}/ca.crt"
TOKEN_FILE = "/var/run/secrets/refit.dev/token"


def weight_version_name(group: str, version: int) -> str:
    """`<group>-v<9 digits>`: deterministic, so that a retried create is idempotent."""
    return f"{group}-v{version:09d}"

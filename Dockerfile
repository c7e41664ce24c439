# anvil-mux in a container, beside its engines: contrib/compose.yaml builds and runs this.
#
# Debian 13 or later has all it needs: Python, Docker's client, Compose v2. Without a registry, on Debian:
#
#     mmdebstrap --variant=apt --include=ca-certificates trixie - | docker import - my-debian
#     docker build --build-arg BASE=my-debian -t anvil-mux .
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv
RUN python3 -m venv /opt/anvil-mux
COPY . /src
# What `anvil-mux --version` tells: --build-arg COMMIT=$(git describe --always --dirty --exclude '*')
ARG COMMIT=
RUN ANVIL_COMMIT=$COMMIT /opt/anvil-mux/bin/pip install --no-cache-dir /src

FROM ${BASE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends docker-cli docker-compose python3 \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
# A volume that is mounted there for the first time takes its owner over.
RUN install -d -m 700 -o 10001 -g 10001 /var/lib/anvil-mux
COPY --from=build /opt/anvil-mux /opt/anvil-mux
COPY contrib/healthy.py /opt/anvil-mux/bin/healthy
ENV PATH=/opt/anvil-mux/bin:$PATH HOME=/var/lib/anvil-mux XDG_STATE_HOME=/var/lib/anvil-mux
USER 10001:10001
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["healthy"]
ENTRYPOINT ["anvil-mux"]
CMD ["serve", "compose.yaml"]

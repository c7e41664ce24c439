# anvil-mux in a container, beside its engines: contrib/compose.yaml builds and runs this.
#
# Debian 13 or later has all it needs: Python, Docker's client, Compose v2.
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv
RUN python3 -m venv /opt/anvil-mux
COPY . /src
RUN /opt/anvil-mux/bin/pip install --no-cache-dir /src

FROM ${BASE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends docker-cli docker-compose python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /var/lib/anvil-mux anvil-mux
COPY --from=build /opt/anvil-mux /opt/anvil-mux
COPY contrib/healthy.py /opt/anvil-mux/bin/healthy
ENV PATH=/opt/anvil-mux/bin:$PATH XDG_STATE_HOME=/var/lib/anvil-mux
USER anvil-mux
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["healthy"]
ENTRYPOINT ["anvil-mux"]
CMD ["serve", "compose.yaml"]

# The service alone. Give it FENCEPOST_DATABASE_URL and FENCEPOST_ADMIN_KEY; without the former it keeps its own
# database in /data (then mount a volume there). The file system may be read-only but for /data and /tmp.
FROM python:3.13-slim AS build
COPY requirements.lock /build/requirements.lock
RUN python -m venv /venv
RUN /venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes -r /build/requirements.lock

FROM python:3.13-slim
# PostgreSQL's initdb wants its user to have a name.
RUN groupadd --system --gid 10001 fencepost && useradd --system --uid 10001 --gid 10001 --no-create-home fencepost
RUN install --directory --owner=10001 --group=10001 --mode=0700 /data
COPY --from=build /venv /venv
COPY alembic.ini /fencepost/alembic.ini
COPY alembic /fencepost/alembic
COPY app /fencepost/app
WORKDIR /fencepost
RUN /venv/bin/python -m compileall -q app alembic
ENV PATH=/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 FENCEPOST_HOST=0.0.0.0 FENCEPOST_DATA_DIR=/data
USER 10001:10001
VOLUME /data
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('FENCEPOST_PORT', '8080') + '/livez', timeout=2)"]
ENTRYPOINT ["python", "-m", "app"]
CMD ["serve"]

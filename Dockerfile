# culprit alone, for workers that play shards or test servers elsewhere: make image.
# An image whose workers start servers is the server's own, with this one's program:
#   COPY --from=culprit /usr/local/bin/culprit /usr/local/bin/culprit
FROM scratch
COPY bin/culprit /usr/local/bin/culprit
ENV PATH=/usr/local/bin HOME=/work TMPDIR=/work
WORKDIR /work
USER 65532:65532
ENTRYPOINT ["culprit"]
